package main

var watches = map[string]func(int) (<-chan struct{}, error){"pidfd": watchProcess, "start": pollProcess}
