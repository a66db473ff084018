. /tmp/env
for v in old src; do cd /tmp/rdD/$v || exit; export PYTHONPATH=/tmp/rdD/$v; i=0
while read -r line; do i=$((i+1)); rm -rf /tmp/rdD/o$v$i; timeout 120 python -m dfl.run --no-report --out /tmp/rdD/o$v$i $line > /tmp/rdD/o$v$i.txt 2>&1; echo "$v $i rc $?"; done <<'L'
--dataset digits --peers 6 --rounds 3 --topology ring --faults link_loss:p=0.3+outage:p=0.1
--dataset digits --peers 6 --rounds 3 --algorithm fedavg --attack sign_flip --aggregator median
--dataset digits --peers 6 --rounds 3 --algorithm qdfedavgm --compressor quantize:bits=2 --faults link_loss:p=0.3
--dataset digits --peers 1 --rounds 2 --compressor quantize:bits=2 --algorithm qdfedavgm
--dataset digits --peers 6 --rounds 3 --algorithm fedavg --attack alie --faults stragglers+outage
--dataset digits --peers 6 --rounds 3 --topology random_out --faults stragglers:work=0.3 --links phone
--dataset digits --peers 6 --rounds 3 --model mlp,logistic --share none --topology random_out
--dataset digits --peers 6 --rounds 3 --algorithm qdfedavgm --compressor top_k --model cnn --topology exponential
L
done
