"""Plans stock SGLang's own R-Fork with rfork: the implementation of `rfork sidecar`, next to an unmodified engine."""
