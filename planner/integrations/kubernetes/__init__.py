"""Kubernetes: a webhook that makes Pods fork, and a controller that sees them come and go."""
