"""Where all speed lives: each engine serves many mechanisms."""
