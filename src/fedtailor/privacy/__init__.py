"""What a client's rows have given away: epsilon at delta, from Google's dp-accounting."""
