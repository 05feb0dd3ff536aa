"""Google Cloud Storage and Azure, through obstore."""
