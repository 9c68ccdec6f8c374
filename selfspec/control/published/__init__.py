"""Published policies, one a file. `selfspec.control.registry` names them."""
