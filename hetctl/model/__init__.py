"""Values shared by all parts of hetctl; standard library only."""
