"""What the command line does with a trained model; a file for each command."""
