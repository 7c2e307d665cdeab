"""Message passing over attention graphs."""
