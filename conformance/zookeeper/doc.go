// Package zookeeper tests package zkstore on real ZooKeeper servers and ensembles, with faults between
// them and their clients.
package zookeeper
