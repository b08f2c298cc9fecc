"""How good the diagnosis is: sound runs of TRL and planted faults, judged and recorded."""
