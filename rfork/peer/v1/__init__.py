"""Generated from proto/rfork/v1/peer.proto by ``make proto``; do not edit."""
