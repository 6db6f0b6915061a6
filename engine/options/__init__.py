"""Filter the host's `transformer_options`. May import: the modules of `engine/`. Door: `filter.OptionsFilter`."""
