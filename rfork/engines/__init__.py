"""Engine integrations: capture, fill and serve the models of each supported engine, one package per engine."""
