create database if not exists slurm_acct_db;
create user if not exists 'slurm'@'%' identified by 'slurm';
grant all on slurm_acct_db.* to 'slurm'@'%';
