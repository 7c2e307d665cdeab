"""Kinds of input folders by authors without knowledge of the readers, by set."""
