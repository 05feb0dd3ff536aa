"""What stands between the planner and whoever starts and stops instances: Kubernetes, and KEDA.

Each hook is a client of the planner's REST API (`fleet`), so that it runs in the planner's process
(``RFORK_PLANNER_INTEGRATIONS``) or in one of its own (`rfork hook`) all the same.
"""
