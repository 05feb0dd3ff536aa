"""Kubernetes integration: a webhook that makes Pods fork, and a controller that watches their workloads."""
