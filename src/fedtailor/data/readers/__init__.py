"""Where federations come from, apart from tables: the named sets, generators, texts, and the files these are kept in."""
