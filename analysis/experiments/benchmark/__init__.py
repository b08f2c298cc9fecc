"""How fast a population trains, beside a plain trainer, TRL and what the machine allows."""
