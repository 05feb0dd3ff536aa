"""External scaler for KEDA: computes the replicas needed from the load of the planner and the engines."""
