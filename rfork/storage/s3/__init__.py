"""S3 and what speaks its protocol: credentials and signatures by botocore, streams of parts up."""
