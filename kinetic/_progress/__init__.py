"""What a person sees of work under way. May import the public values and the runner's protocol."""
