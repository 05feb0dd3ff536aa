"""Stock SGLang's own R-Fork, planned by rfork: what `rfork sidecar` runs beside an unmodified engine."""
