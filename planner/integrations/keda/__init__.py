"""KEDA's external scaler: how many replicas the planner's and the engines' load asks for."""
