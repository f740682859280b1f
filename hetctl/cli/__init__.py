"""Commands: parse, call one function of `app`, print one value of `report`."""
