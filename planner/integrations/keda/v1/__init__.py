"""Generated from proto/externalscaler/externalscaler.proto by ``make proto``; do not edit."""
