"""Every setting, declared once: ours, the knobs of a plan, what each costs, TRL's own. Runs in any process (pure)."""
