//go:build !linux

package main

var watches = map[string]func(int) (<-chan struct{}, error){"": watchProcess}
