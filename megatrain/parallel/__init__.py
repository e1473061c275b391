"""The ranks that train one model together, and the rows that they share."""
