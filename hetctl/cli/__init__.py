"""One module per command: parse, call one function of `runner`, print one value of `report`."""
