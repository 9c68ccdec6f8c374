"""The command line. `app` has the commands, `options` their options; every other module is one command or its parts."""

from selfspec.cli.app import main as main
