"""S3 and compatible services: credentials and signatures by botocore, streaming multipart uploads."""
