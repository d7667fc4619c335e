"""Move one guest: preflight, estimate, watch and settle decide (pure); gather and engine do."""
