"""Operations on whole stores: verify, lint, merge and subset."""
