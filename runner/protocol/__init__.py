"""What client and job agree on: names, formats and signatures of what lies in a store."""
