"""What scripts written for TRL import beside the trainer: argument classes, their parser, and what is made of
them."""
