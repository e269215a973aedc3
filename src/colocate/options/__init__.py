"""Options as data: names, values, requirements, help, and the files that they are read from."""
