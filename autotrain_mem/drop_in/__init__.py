"""TRL's trainers in a script: the same classes, which plan before they load anything."""
