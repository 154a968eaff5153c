package zookeeper

var children = map[string]func(){}
