"""`jprefill bench serve`: load on a running server. `command` reads the flags, `driver` sends, `clients` speak HTTP."""
