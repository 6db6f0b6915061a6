"""What dev.py and the tests share. Nothing in here is needed by people who only use the nodes."""
