"""Collectives between processes of one host, through memory they share."""
