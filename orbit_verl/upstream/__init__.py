"""Changes to verl: how one is made once its module is imported, and the ledger that proves all of them."""
