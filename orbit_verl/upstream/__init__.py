"""Each change to verl is made once its module is imported, and a ledger proves all of them."""
