"""Generated from proto/grpc/health/v1/health.proto by ``make proto``; do not edit."""
