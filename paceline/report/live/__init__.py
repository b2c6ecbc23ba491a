"""A run while it goes on: what is known of it now, the page and the terminal view that show it."""
