"""How each engine's models are captured, filled and served: one thin room an engine."""
