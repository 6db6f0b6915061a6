"""Run convolutions that stay eager in channels_last. May import: `background` and what is below it. Door: `function_mode`."""
