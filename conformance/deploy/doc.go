// Package deploy shows, on real servers and with both clients, what happens in every kind of
// Redis deployment and in every state that a server can be in: it works, or the error says
// what is wrong and what to do, and no call hangs.
package deploy
