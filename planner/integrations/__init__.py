"""Integrations of the planner with systems that start and stop instances: Kubernetes and KEDA.

Each integration is a client of the planner's REST API (`planner_api`), so it can run in the planner's process
(``RFORK_PLANNER_INTEGRATIONS``) or in its own (`rfork k8s`).
"""
