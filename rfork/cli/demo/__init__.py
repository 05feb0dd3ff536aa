"""`rfork demo`, and the model it uses."""
