mod mysql;
