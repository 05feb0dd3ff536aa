"""gRPC's health check (grpc.health.v1), for kubelets."""
