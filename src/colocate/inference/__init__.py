"""A trained model in hand: loaded without an optimizer, talked to, and measured."""
